import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.common.acl.AccessControlEntry;
import org.apache.kafka.common.acl.AclBinding;
import org.apache.kafka.common.acl.AclOperation;
import org.apache.kafka.common.acl.AclPermissionType;
import org.apache.kafka.common.resource.PatternType;
import org.apache.kafka.common.resource.ResourcePattern;
import org.apache.kafka.common.resource.ResourceType;

/** Hides a topic from a principal. */
class DenyDescribe {
    public static void main(String[] arguments) throws Exception {
        ResourcePattern topic = new ResourcePattern(ResourceType.TOPIC, arguments[1], PatternType.LITERAL);
        AccessControlEntry deny =
                new AccessControlEntry(arguments[2], "*", AclOperation.DESCRIBE, AclPermissionType.DENY);
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", arguments[0]))) {
            admin.createAcls(List.of(new AclBinding(topic, deny))).all().get();
        }
    }
}
